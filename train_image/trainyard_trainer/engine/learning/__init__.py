"""What training changes, one step at a time: network, optimizers, and the sums of loss and metrics."""
