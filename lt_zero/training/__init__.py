"""A run, and the faces that drive it: Lightning's Trainer, Fabric, and a loop of one's own."""
