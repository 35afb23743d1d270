// Asks a Tessera server for scores of samples that are read from standard input.
//
//	predict [--strings] HOST:PORT < samples.txt
//
// A line is a sample: its dense values, then the ids of each feature in the order of the model's schema, which
// `tessera inspect MODEL.pt` lists.  A space stands between two features, a comma between two values of one, "-" stands
// for none, and "nan" for a dense value that is missing:
//
//	0.5,nan 7 8,9 -
//
// An answer is a line for each sample and output: the sample's number, the output's name, the values.  With --strings the
// ids are sent as the texts that they are, of which the server makes the ids.  docs/client.md says how to generate the
// package tessera/predictor from protos/predictor.proto, and how to build this program.
//
// Exit status: 0 every sample was scored; 1 the server did not score them; 2 the command or a line has to be changed.
package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	_ "google.golang.org/grpc/health" // has the connection ask for the servers' health
	"google.golang.org/grpc/status"

	pb "tessera/predictor"
)

const timeout = 5 * time.Second

// sample is a line: its dense values, and the ids of each feature as they were written.
type sample struct {
	dense []float32
	bags  [][]string
}

// wordsOf returns the values of one feature.
func wordsOf(text string) []string {
	if text == "-" {
		return nil
	}
	return strings.Split(text, ",")
}

func parseSample(line string) (sample, error) {
	parts := strings.Fields(line)
	var read sample
	for _, word := range wordsOf(parts[0]) {
		value, err := strconv.ParseFloat(word, 32)
		if err != nil {
			return read, fmt.Errorf("%q is not a dense value", word)
		}
		read.dense = append(read.dense, float32(value))
	}
	for _, part := range parts[1:] {
		read.bags = append(read.bags, wordsOf(part))
	}
	return read, nil
}

// readSamples reads samples that have as many dense values and features as the first.
func readSamples(input io.Reader) ([]sample, error) {
	var samples []sample
	lines := bufio.NewScanner(input)
	lines.Buffer(nil, 1<<24)
	for number := 1; lines.Scan(); number++ {
		if strings.TrimSpace(lines.Text()) == "" {
			continue
		}
		read, err := parseSample(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if len(samples) > 0 {
			first := samples[0]
			if len(read.dense) != len(first.dense) || len(read.bags) != len(first.bags) {
				return nil, fmt.Errorf("line %d has %d dense values and %d features; the first line has %d and %d",
					number, len(read.dense), len(read.bags), len(first.dense), len(first.bags))
			}
		}
		samples = append(samples, read)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(samples) == 0 {
		return nil, fmt.Errorf("standard input has no samples")
	}
	return samples, nil
}

// encode lays the samples out as the protocol wants them, all numbers little-endian: dense values sample by sample,
// lengths and ids feature by feature.
func encode(samples []sample, asStrings bool) (*pb.PredictionRequest, error) {
	var dense, lengths, ids []byte
	var texts [][]byte
	for _, one := range samples {
		for _, value := range one.dense {
			dense = binary.LittleEndian.AppendUint32(dense, math.Float32bits(value))
		}
	}
	features := len(samples[0].bags)
	for feature := 0; feature < features; feature++ {
		for number, one := range samples {
			bag := one.bags[feature]
			lengths = binary.LittleEndian.AppendUint32(lengths, uint32(len(bag)))
			for _, word := range bag {
				if asStrings {
					texts = append(texts, []byte(word))
					continue
				}
				id, err := strconv.ParseInt(word, 10, 64)
				if err != nil {
					return nil, fmt.Errorf("sample %d, feature %d: %q is not a whole number; give --strings to send texts",
						number, feature, word)
				}
				ids = binary.LittleEndian.AppendUint64(ids, uint64(id))
			}
		}
	}
	return &pb.PredictionRequest{
		BatchSize:     int32(len(samples)),
		FloatFeatures: &pb.FloatFeatures{NumFeatures: int32(len(samples[0].dense)), Values: dense},
		IdListFeatures: &pb.SparseFeatures{
			NumFeatures: int32(features), Lengths: lengths, ValuesInt64: ids, ValuesBytes: texts,
		},
	}, nil
}

// Calls are shared between the addresses of a name such as dns:///tessera-pods:50051, as long as their health is SERVING.
const balancing = `{"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}`

// predict sends a request and waits for its answer.
func predict(address string, request *pb.PredictionRequest) (*pb.PredictionResponse, error) {
	connection, err := grpc.Dial(address, grpc.WithInsecure(),
		grpc.WithDefaultServiceConfig(balancing))
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return pb.NewPredictorClient(connection).Predict(ctx, request)
}

// write prints the values of each sample; an output has one or several for each.
func write(output io.Writer, samples int, response *pb.PredictionResponse) {
	names := make([]string, 0, len(response.Predictions))
	for name := range response.Predictions {
		names = append(names, name)
	}
	sort.Strings(names)
	for number := 0; number < samples; number++ {
		for _, name := range names {
			data := response.Predictions[name].Data
			width := len(data) / samples
			fmt.Fprint(output, number, " ", name)
			for _, value := range data[number*width : (number+1)*width] {
				fmt.Fprint(output, " ", strconv.FormatFloat(float64(value), 'g', -1, 32))
			}
			fmt.Fprintln(output)
		}
	}
}

func main() {
	asStrings := flag.Bool("strings", false, "send ids as texts")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: predict [--strings] HOST:PORT < samples.txt")
	}
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	samples, err := readSamples(os.Stdin)
	var request *pb.PredictionRequest
	if err == nil {
		request, err = encode(samples, *asStrings)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	response, err := predict(flag.Arg(0), request)
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s\n", status.Code(err), status.Convert(err).Message())
		os.Exit(1)
	}
	output := bufio.NewWriter(os.Stdout)
	defer output.Flush()
	write(output, len(samples), response)
}
