"""Responses of the actor and what is computed about them."""
