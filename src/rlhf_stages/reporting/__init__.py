"""What an experiment folder says, for people: read as it is found, computed without torch, written as one page."""
