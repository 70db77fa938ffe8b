"""What the demo pages do, without the pages: finding experiments, loading models, replies as they come."""
