"""Graph to graph: capturing a model, choosing layouts, and rewriting it to run on a mesh."""
