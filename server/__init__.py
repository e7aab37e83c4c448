"""The server side of the Flower app: an adapter, no mathematics."""
