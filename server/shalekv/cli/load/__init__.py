"""`shalekv load`: files of pairs, batches, and how far a load has come."""
