"""The client side of the Flower app: an adapter, no mathematics."""

CLIENT_APP_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
