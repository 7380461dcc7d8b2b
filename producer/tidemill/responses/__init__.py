"""Responses of OpenAI's API that are kept: what of them is not in their jobs."""
