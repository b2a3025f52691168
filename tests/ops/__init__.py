"""What is in ops/, run by a real Prometheus over real processes."""
