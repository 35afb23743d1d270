// The interop cases of gRPC that apply, by grpc-go: grpc_go_cases ADDRESS SMALL LARGE
//
// It needs google.golang.org/grpc alone: messages are bytes.  The first case that fails ends it with status 1.
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	predict    = "/predictor.Predictor/Predict"
	check      = "/grpc.health.v1.Health/Check"
	watch      = "/grpc.health.v1.Health/Watch"
	reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
	otherModel = "no such 100% \u03b1"
	wait       = time.Minute
)

// raw passes messages on as they are.
type raw struct{}

func (raw) Marshal(message interface{}) ([]byte, error) { return *message.(*[]byte), nil }

func (raw) Unmarshal(data []byte, message interface{}) error {
	*message.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func (raw) Name() string { return "proto" }

// peer is a connection and the two requests for scores.
type peer struct {
	connection   *grpc.ClientConn
	small, large []byte
}

func expect(holds bool, seen ...interface{}) {
	if !holds {
		fmt.Fprintln(os.Stderr, append([]interface{}{"not as expected:"}, seen...)...)
		os.Exit(1)
	}
}

func (p peer) unary(ctx context.Context, path string, content []byte, options ...grpc.CallOption) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	var answer []byte
	err := p.connection.Invoke(ctx, path, &content, &answer, options...)
	return answer, err
}

func (p peer) answered(ctx context.Context, path string, content []byte, options ...grpc.CallOption) []byte {
	answer, err := p.unary(ctx, path, content, options...)
	expect(err == nil, path, err)
	return answer
}

func emptyUnary(p peer) {
	answer := p.answered(context.Background(), check, nil)
	expect(bytes.Equal(answer, []byte{8, 1}), answer)
}

func largeUnary(p peer) {
	one := p.answered(context.Background(), predict, p.small)
	many := p.answered(context.Background(), predict, p.large)
	expect(len(many) > len(one), len(many), len(one))
}

func compressedUnary(p peer) {
	for _, content := range [][]byte{p.small, p.large} {
		expect(len(p.answered(context.Background(), predict, content, grpc.UseCompressor(gzip.Name))) > 0)
	}
}

func statuses(p peer) {
	asked := append(append([]byte(nil), p.small...), 0xa2, 0x06, byte(len(otherModel)))
	_, err := p.unary(context.Background(), predict, append(asked, otherModel...))
	expect(status.Code(err) == codes.NotFound && strings.Contains(err.Error(), otherModel), err)
	_, err = p.unary(context.Background(), predict, []byte{0xff})
	expect(status.Code(err) == codes.InvalidArgument, err)
	_, err = p.unary(context.Background(), "/no.Such/Method", p.small)
	expect(status.Code(err) == codes.Unimplemented, err)
}

func customMetadata(p peer) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	ctx := metadata.AppendToOutgoingContext(context.Background(), "x-own", "value", "x-own-bin", string(every), "x-own",
		strings.Repeat("x", 4000))
	p.answered(ctx, predict, p.small)
}

// deadline: a stream without an end passes its deadline for certain.
func deadline(p peer) {
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	stream, err := p.connection.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, watch)
	expect(err == nil, err)
	var empty, answer []byte
	expect(stream.SendMsg(&empty) == nil && stream.CloseSend() == nil)
	for err == nil {
		err = stream.RecvMsg(&answer)
	}
	expect(status.Code(err) == codes.DeadlineExceeded, err)
	p.answered(context.Background(), predict, p.small)
}

func cancelled(p peer) {
	for i := 0; i < 20; i++ {
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(time.Millisecond, cancel)
		_, err := p.unary(ctx, predict, p.large)
		expect(err == nil || status.Code(err) == codes.Canceled, err)
		cancel()
	}
	p.answered(context.Background(), predict, p.small)
}

func manyAtOnce(p peer) {
	var calls sync.WaitGroup
	for i := 0; i < 500; i++ {
		calls.Add(1)
		go func() {
			defer calls.Done()
			p.answered(context.Background(), predict, p.small)
		}()
	}
	calls.Wait()
}

// streams: both sides in turn, then the client's end.
func streams(p peer) {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	description := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	stream, err := p.connection.NewStream(ctx, description, reflection)
	expect(err == nil, err)
	list := []byte{0x3a, 0}
	var answer []byte
	for i := 0; i < 3; i++ {
		expect(stream.SendMsg(&list) == nil)
		err = stream.RecvMsg(&answer)
		expect(err == nil && bytes.Contains(answer, []byte("predictor.Predictor")), err, string(answer))
	}
	expect(stream.CloseSend() == nil)
	err = stream.RecvMsg(&answer)
	expect(err == io.EOF, err)
}

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})))
	expect(err == nil, err)
	small, err := os.ReadFile(os.Args[2])
	expect(err == nil, err)
	large, err := os.ReadFile(os.Args[3])
	expect(err == nil, err)
	cases := []func(peer){
		emptyUnary, largeUnary, compressedUnary, statuses, customMetadata, deadline, cancelled, manyAtOnce, streams,
	}
	for _, one := range cases {
		one(peer{connection, small, large})
	}
	fmt.Printf("grpc-go %s: %d cases\n", grpc.Version, len(cases))
}
