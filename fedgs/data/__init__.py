"""Private images and their owners."""
