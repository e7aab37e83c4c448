"""What `fedgs evaluate` does: metrics of images, tables and pictures."""
