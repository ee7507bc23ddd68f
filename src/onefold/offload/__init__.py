"""Offload: state kept in host memory or on disk, and the transfers to and from the device."""
