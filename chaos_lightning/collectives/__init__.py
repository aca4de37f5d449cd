"""All-reduces gradients along trees, chunk by chunk while backward runs, into a buffer apart from the gradients."""
