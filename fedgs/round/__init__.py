"""The round and its two sides, server and node, and the loop around it."""
