"""Loading the manifest, and editing it by compare-and-swap."""
