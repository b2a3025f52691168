"""`shalekv load`: file formats of pairs, batches, bulk loads, and the state of a load."""
