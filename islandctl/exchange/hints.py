"""What to do when cells cannot go on as they are, in words that hold in a launched run and inside one process."""

BACK = "go back to the newest step that all cells have saved (a launched run: `islandctl resume`)"
NO_LONGER_EQUAL = "the replicas no longer agree: " + BACK
EARLIER = "load into all cells what they saved at an earlier step (a launched run: `islandctl resume --from STEP`)"
CALMER = "lower the learning rate or clip gradients, and begin anew (a launched run: `islandctl launch`)"
