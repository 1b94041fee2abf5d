"""The heart: the contract, the patterns and every family of mechanisms."""
