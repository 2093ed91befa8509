"""What a training technique gains: time and memory of trainings with it and without, beside the plan."""
