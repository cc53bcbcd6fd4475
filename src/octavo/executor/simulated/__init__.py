"""The executor that computes nothing and takes the time that the cost model predicts."""
