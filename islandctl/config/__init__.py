"""Site profiles, recipes and jobs: text in, typed and checked values out."""
