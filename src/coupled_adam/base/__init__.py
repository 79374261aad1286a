"""The floor: small tools that every room uses; imports nothing of ours."""
