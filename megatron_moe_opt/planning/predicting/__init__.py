"""What a layer takes on a cluster, by the models of the papers."""
