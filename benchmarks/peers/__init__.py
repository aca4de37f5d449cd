"""What others make of the same blows: torchft, torchrun, and their coordinators."""
