// Package bngrad is a client of bngrad in Go, small enough to copy. It needs grpc-go and the code that protoc makes of the
// .proto file.
package bngrad

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "bngrad/v1"
)

// Options are paths of PEM files and of a token; an empty one is not used.
type Options struct {
	CA               string // authorities of the server's certificate; with one, connections use TLS
	Certificate, Key string // of this client
	TokenFile        string
}

// Client calls a server; goroutines may share it. Each op is a method with a context, which should have a deadline.
type Client struct {
	pb.BatchNormGradServiceClient
	connection *grpc.ClientConn
}

// NewClient connects in the background; target is HOST:PORT or unix:PATH.
func NewClient(target string, options Options) (*Client, error) {
	security := grpc.WithInsecure()
	if options.CA != "" {
		config, err := tlsConfig(options)
		if err != nil {
			return nil, err
		}
		security = grpc.WithTransportCredentials(credentials.NewTLS(config))
	}
	token, err := readToken(options.TokenFile)
	if err != nil {
		return nil, err
	}
	authorize := func(ctx context.Context, method string, request, reply interface{}, connection *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		if token != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
		}
		return invoke(ctx, method, request, reply, connection, options...)
	}
	unlimited := grpc.MaxCallRecvMsgSize(math.MaxInt32) // the default is 4 MiB
	connection, err := grpc.Dial(target, security, grpc.WithUnaryInterceptor(authorize), grpc.WithDefaultCallOptions(unlimited))
	if err != nil {
		return nil, err
	}
	return &Client{pb.NewBatchNormGradServiceClient(connection), connection}, nil
}

// Close ends the connection, and with it the calls under way.
func (client *Client) Close() error {
	return client.connection.Close()
}

// Tensor makes a float32 tensor of a request.
func Tensor(values []float32, shape ...int64) *pb.Tensor {
	data := make([]byte, 4*len(values))
	for i, value := range values {
		binary.LittleEndian.PutUint32(data[4*i:], math.Float32bits(value))
	}
	return &pb.Tensor{Dtype: pb.DataType_DATA_TYPE_FLOAT32, Shape: shape, Data: data}
}

// Values returns the elements of a float32 tensor of a response.
func Values(tensor *pb.Tensor) []float32 {
	values := make([]float32, len(tensor.Data)/4)
	for i := range values {
		values[i] = math.Float32frombits(binary.LittleEndian.Uint32(tensor.Data[4*i:]))
	}
	return values
}

// Violations returns what the error of a call says about the fields of its request.
func Violations(err error) []*errdetails.BadRequest_FieldViolation {
	var violations []*errdetails.BadRequest_FieldViolation
	for _, detail := range status.Convert(err).Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok {
			violations = append(violations, bad.FieldViolations...)
		}
	}
	return violations
}

func readToken(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	content, err := os.ReadFile(path)
	return strings.TrimSpace(string(content)), err
}

func tlsConfig(options Options) (*tls.Config, error) {
	authorities, err := os.ReadFile(options.CA)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(authorities) {
		return nil, fmt.Errorf("%s holds no certificate", options.CA)
	}
	if options.Certificate != "" {
		pair, err := tls.LoadX509KeyPair(options.Certificate, options.Key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}
