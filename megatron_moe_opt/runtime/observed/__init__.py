"""What a pass of a layer was seen to do, and where it is."""
