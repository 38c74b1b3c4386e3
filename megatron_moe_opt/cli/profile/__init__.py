"""What every move of rows costs on this cluster: `moe-opt profile`."""
