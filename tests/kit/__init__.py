"""The parts that tests share: stores with faults, clusters, processes, and one model."""
