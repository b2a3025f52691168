"""ShaleKV for Spark."""
