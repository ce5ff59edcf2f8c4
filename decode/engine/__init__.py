"""The engine: requests in, their steps as one forward a time, predictions back."""
