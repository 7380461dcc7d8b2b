"""LoRA adapters: small changes to the weights of a model, chosen job by job."""
