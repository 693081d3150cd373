"""Measurements, side by side. Nothing here is imported by the product."""
