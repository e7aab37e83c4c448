"""One reader for each format that private images come in."""
