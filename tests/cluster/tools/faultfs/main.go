// A folder that fails when told to: what lies in BACKING shows at MOUNT, until the file FAULT says
// otherwise. It holds a word that is read before each operation:
//
//	full         nothing can be written or made
//	read-only    nor removed or renamed
//	slow 200ms   each operation takes so long
//
// usage: faultfs BACKING MOUNT FAULT
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// kind of an operation, by what stands in its way.
type kind int

const (
	looks kind = iota
	changes
	grows
)

// faults are told by a file, so that whoever made the mount can have them come and go.
type faults struct{ file string }

// strike is what an operation of that kind meets now.
func (f faults) strike(what kind) syscall.Errno {
	text, err := os.ReadFile(f.file)
	if err != nil {
		return fs.OK
	}
	word, rest, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	switch {
	case word == "full" && what == grows:
		return syscall.ENOSPC
	case word == "read-only" && what != looks:
		return syscall.EROFS
	case word == "slow":
		latency, err := time.ParseDuration(rest)
		if err != nil {
			return syscall.EINVAL
		}
		time.Sleep(latency)
	}
	return fs.OK
}

// node is a file or a folder of the backing one.
type node struct {
	*fs.LoopbackNode
	faults faults
}

func (n *node) WrapChild(_ context.Context, ops fs.InodeEmbedder) fs.InodeEmbedder {
	return &node{ops.(*fs.LoopbackNode), n.faults}
}

func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if errno := n.faults.strike(looks); errno != fs.OK {
		return nil, errno
	}
	return n.LoopbackNode.Lookup(ctx, name, out)
}

func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	what := looks
	if flags&(syscall.O_WRONLY|syscall.O_RDWR) != 0 {
		what = changes
	}
	if errno := n.faults.strike(what); errno != fs.OK {
		return nil, 0, errno
	}
	handle, flags, errno := n.LoopbackNode.Open(ctx, flags)
	return n.open(handle), flags, errno
}

func (n *node) open(handle fs.FileHandle) fs.FileHandle {
	if found, ok := handle.(*fs.LoopbackFile); ok {
		return &file{found, n.faults}
	}
	return handle
}

func (n *node) Setattr(ctx context.Context, file fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if errno := n.faults.strike(changes); errno != fs.OK {
		return errno
	}
	return n.LoopbackNode.Setattr(ctx, file, in, out)
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	if errno := n.faults.strike(grows); errno != fs.OK {
		return nil, nil, 0, errno
	}
	child, handle, flags, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	return child, n.open(handle), flags, errno
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if errno := n.faults.strike(grows); errno != fs.OK {
		return nil, errno
	}
	return n.LoopbackNode.Mkdir(ctx, name, mode, out)
}

func (n *node) Link(ctx context.Context, target fs.InodeEmbedder, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if errno := n.faults.strike(grows); errno != fs.OK {
		return nil, errno
	}
	return n.LoopbackNode.Link(ctx, target, name, out)
}

func (n *node) Rename(ctx context.Context, name string, parent fs.InodeEmbedder, to string, flags uint32) syscall.Errno {
	if errno := n.faults.strike(changes); errno != fs.OK {
		return errno
	}
	return n.LoopbackNode.Rename(ctx, name, parent, to, flags)
}

func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	if errno := n.faults.strike(changes); errno != fs.OK {
		return errno
	}
	return n.LoopbackNode.Unlink(ctx, name)
}

func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno {
	if errno := n.faults.strike(changes); errno != fs.OK {
		return errno
	}
	return n.LoopbackNode.Rmdir(ctx, name)
}

// file is an open file.
type file struct {
	*fs.LoopbackFile
	faults faults
}

// PassthroughFd has the kernel ask us, and not the backing file at once.
func (f *file) PassthroughFd() (int, bool) { return 0, false }

func (f *file) Read(ctx context.Context, to []byte, offset int64) (fuse.ReadResult, syscall.Errno) {
	if errno := f.faults.strike(looks); errno != fs.OK {
		return nil, errno
	}
	return f.LoopbackFile.Read(ctx, to, offset)
}

func (f *file) Write(ctx context.Context, data []byte, offset int64) (uint32, syscall.Errno) {
	if errno := f.faults.strike(grows); errno != fs.OK {
		return 0, errno
	}
	return f.LoopbackFile.Write(ctx, data, offset)
}

func (f *file) Fsync(ctx context.Context, flags uint32) syscall.Errno {
	if errno := f.faults.strike(changes); errno != fs.OK {
		return errno
	}
	return f.LoopbackFile.Fsync(ctx, flags)
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: faultfs BACKING MOUNT FAULT")
		os.Exit(2)
	}
	if err := serve(os.Args[1], os.Args[2], faults{os.Args[3]}); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func serve(backing, mount string, faults faults) error {
	syscall.Umask(0) // the callers' own counts
	root, err := fs.NewLoopbackRoot(backing)
	if err != nil {
		return err
	}
	server, err := fs.Mount(mount, &node{root.(*fs.LoopbackNode), faults}, &fs.Options{
		MountOptions: fuse.MountOptions{
			AllowOther:        true,
			DirectMountStrict: true,
			FsName:            backing,
			Name:              "faultfs",
			Options:           []string{"default_permissions"},
		},
	})
	if err != nil {
		return err
	}
	fmt.Println("mounted")
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-told
		if err := server.Unmount(); err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
		}
	}()
	server.Wait()
	return nil
}
