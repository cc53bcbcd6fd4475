"""Teaching drafters to guess what a model will say."""
