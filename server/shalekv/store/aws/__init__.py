"""What clients of any service of Amazon's need: credentials, and discretion about them."""
