"""Formats: pure translation between stored or sent bytes and the values of `protocol`."""
