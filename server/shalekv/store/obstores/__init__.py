"""Google Cloud Storage and Azure Blob Storage, by way of obstore."""
