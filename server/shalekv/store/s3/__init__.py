"""S3, and the servers and services that speak its protocol."""
