// The process that holds a pod's namespaces while its containers come and go: it waits for a signal.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	done := make(chan os.Signal, 1)
	signal.Notify(done, syscall.SIGINT, syscall.SIGTERM)
	<-done
}
