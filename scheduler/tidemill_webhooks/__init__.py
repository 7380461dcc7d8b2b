"""Tells the owners of finished work by signed webhooks, at least once."""
