"""The doctor: are these sites fit for this recipe, and what do their links really carry?"""
