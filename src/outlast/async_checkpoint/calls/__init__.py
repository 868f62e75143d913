"""The queue of background calls, and the processes that run them."""
