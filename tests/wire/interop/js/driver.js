// gRPC's interop cases by grpc-js: `node driver.js ADDRESS CASE...` prints each case that passed,
// and ends with an error at the first that did not. NODE_PATH has the packages.
'use strict';

const assert = require('node:assert');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const PROTO = path.join(__dirname, '..', 'testing.proto');
const service = grpc.loadPackageDefinition(loader.loadSync(PROTO, { keepCase: true })).grpc.testing;

const LARGE_REQUEST_BYTES = 271828;
const LARGE_REPLY_BYTES = 314159;
const REQUEST_SIZES = [27182, 8, 1828, 45904];
const REPLY_SIZES = [31415, 9, 2653, 58979];
const SPECIAL = '\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n';

const sized = (bytes) => ({ body: Buffer.alloc(bytes) });
const asking = (sizes, rest) => ({ response_parameters: sizes.map((size) => ({ size })), ...rest });

// The result of a call with one reply: {error, reply}.
function unary(client, method, request, options = {}) {
  return new Promise((resolve) => {
    client[method](request, new grpc.Metadata(), options, (error, reply) => {
      resolve({ error, reply });
    });
  });
}

// The sizes of all replies, and the status of the end.
function drain(call, onReply = () => {}) {
  return new Promise((resolve) => {
    const sizes = [];
    call.on('data', (reply) => {
      sizes.push(reply.payload.body.length);
      onReply(sizes.length);
    });
    call.on('error', () => {}); // the status tells it as well
    call.on('status', (status) => resolve({ sizes, status }));
  });
}

async function largeUnary(client, compressed) {
  const request = { response_size: LARGE_REPLY_BYTES, payload: sized(LARGE_REQUEST_BYTES) };
  const more = compressed === undefined ? {} : { response_compressed: { value: compressed } };
  const { error, reply } = await unary(client, 'UnaryCall', { ...request, ...more });
  assert.ifError(error);
  assert.strictEqual(reply.payload.body.length, LARGE_REPLY_BYTES);
}

async function checkStatus(client, code, message) {
  const response_status = { code, message };
  const { error } = await unary(client, 'UnaryCall', { response_status });
  assert.deepStrictEqual([error.code, error.details], [code, message]);
  const call = client.FullDuplexCall();
  call.write({ response_status });
  call.end();
  const { status } = await drain(call);
  assert.deepStrictEqual([status.code, status.details], [code, message]);
}

const cases = {
  async empty_unary(client) {
    const { error, reply } = await unary(client, 'EmptyCall', {});
    assert.ifError(error);
    assert.deepStrictEqual({ ...reply }, {});
  },

  large_unary: (client) => largeUnary(client),

  async server_compressed_unary(client) {
    await largeUnary(client, true);
    await largeUnary(client, false);
  },

  async client_streaming(client) {
    const result = await new Promise((resolve) => {
      const call = client.StreamingInputCall((error, reply) => resolve({ error, reply }));
      REQUEST_SIZES.forEach((size) => call.write({ payload: sized(size) }));
      call.end();
    });
    assert.ifError(result.error);
    const total = REQUEST_SIZES.reduce((sum, size) => sum + size);
    assert.strictEqual(result.reply.aggregated_payload_size, total);
  },

  async server_streaming(client) {
    const { sizes, status } = await drain(client.StreamingOutputCall(asking(REPLY_SIZES)));
    assert.deepStrictEqual(sizes, REPLY_SIZES);
    assert.strictEqual(status.code, grpc.status.OK);
  },

  async ping_pong(client) {
    const call = client.FullDuplexCall();
    const ask = (n) => call.write(asking([REPLY_SIZES[n]], { payload: sized(REQUEST_SIZES[n]) }));
    ask(0);
    const { sizes, status } = await drain(call, (count) => {
      if (count < REPLY_SIZES.length) ask(count);
      else call.end();
    });
    assert.deepStrictEqual(sizes, REPLY_SIZES);
    assert.strictEqual(status.code, grpc.status.OK);
  },

  async empty_stream(client) {
    const call = client.FullDuplexCall();
    call.end();
    const { sizes, status } = await drain(call);
    assert.deepStrictEqual([sizes, status.code], [[], grpc.status.OK]);
  },

  async cancel_after_begin(client) {
    const error = await new Promise((resolve) => {
      const call = client.StreamingInputCall(resolve);
      call.cancel();
    });
    assert.strictEqual(error.code, grpc.status.CANCELLED);
  },

  async cancel_after_first_response(client) {
    const call = client.FullDuplexCall();
    call.write(asking([REPLY_SIZES[0]], { payload: sized(REQUEST_SIZES[0]) }));
    const { status } = await drain(call, () => call.cancel());
    assert.strictEqual(status.code, grpc.status.CANCELLED);
  },

  async timeout_on_sleeping_server(client) {
    const call = client.FullDuplexCall({ deadline: Date.now() + 1 });
    call.write({ payload: sized(REQUEST_SIZES[0]) });
    const { status } = await drain(call);
    assert.strictEqual(status.code, grpc.status.DEADLINE_EXCEEDED);
  },

  status_code_and_message: (client) =>
    checkStatus(client, grpc.status.UNKNOWN, 'test status message'),

  special_status_message: (client) => checkStatus(client, grpc.status.UNKNOWN, SPECIAL),

  async custom_metadata(client) {
    const metadata = new grpc.Metadata();
    metadata.set('x-grpc-test-echo-initial', 'test_initial_metadata_value');
    metadata.set('x-grpc-test-echo-trailing-bin', Buffer.from([0xab, 0xab, 0, 0xff]));
    const found = {};
    await new Promise((resolve) => {
      const call = client.UnaryCall({ response_size: 1 }, metadata, () => {});
      call.on('metadata', (header) => {
        found.initial = header.get('x-grpc-test-echo-initial');
      });
      call.on('status', (status) => {
        found.trailing = status.metadata.get('x-grpc-test-echo-trailing-bin');
        resolve();
      });
    });
    assert.deepStrictEqual(found.initial, ['test_initial_metadata_value']);
    assert.deepStrictEqual(found.trailing, [Buffer.from([0xab, 0xab, 0, 0xff])]);
  },

  async unimplemented_method(client) {
    const { error } = await unary(client, 'UnimplementedCall', {});
    assert.strictEqual(error.code, grpc.status.UNIMPLEMENTED);
  },

  async unimplemented_service(client, address) {
    const other = new service.UnimplementedService(address, grpc.credentials.createInsecure());
    const { error } = await unary(other, 'UnimplementedCall', {});
    other.close();
    assert.strictEqual(error.code, grpc.status.UNIMPLEMENTED);
  },

  // None of gRPC's: requests compressed by gzip, as a channel with that default sends them.
  async compressed_requests(_client, address) {
    const options = { 'grpc.default_compression_algorithm': 2 };
    const credentials = grpc.credentials.createInsecure();
    const client = new service.TestService(address, credentials, options);
    await largeUnary(client);
    await cases.client_streaming(client);
    await cases.ping_pong(client);
    client.close();
  },

  // None of gRPC's: many calls share the windows of one connection.
  concurrent_large_unaries: (client) =>
    Promise.all(Array.from({ length: 64 }, () => largeUnary(client))),
};

async function main(address, names) {
  for (const name of names) {
    const client = new service.TestService(address, grpc.credentials.createInsecure());
    await cases[name](client, address);
    client.close();
    console.log(name);
  }
}

main(process.argv[2], process.argv.slice(3)).catch((error) => {
  console.error(error);
  process.exit(1);
});
