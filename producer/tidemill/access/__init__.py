"""API keys of the HTTP interface: how they look, where they are kept, who may make them."""
