"""Code that tests share: stores with faults, clusters, processes, virtual time, and one model."""
