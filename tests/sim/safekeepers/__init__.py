"""The shipped safekeepers in the simulation: machines with disks, and a network between them."""
