"""Routers: hidden states to the mask of executing groups, alone or with the norm before it."""
