"""Code of our own for the devices that profit from it; everything else is composed from torch operations."""
