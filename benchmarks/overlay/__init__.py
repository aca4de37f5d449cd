"""All-reduces over an overlay of uneven links."""
