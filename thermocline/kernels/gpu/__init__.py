"""What needs a device. The only package that may import Triton; torch is imported when a device is asked for."""
