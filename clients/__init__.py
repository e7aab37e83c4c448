"""The client side of the Flower app: an adapter, no mathematics."""
