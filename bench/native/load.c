/* A cheap load generator for overhead benches: HTTP/1.1 keep-alive, one thread, epoll.
 *
 *   load PORT CONNECTIONS SECONDS RATE BODY_FILE [HEADER...]
 *
 * RATE 0: closed loop, every connection sends its next request at once. RATE > 0: open loop,
 * requests a second spread evenly; a request waits for a free connection when all are busy.
 * Prints one line of JSON: requests, errors, seconds, first-byte and total latencies in us.
 * An answer counts when its status is 200 and, for a stream, when [DONE] came.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_SAMPLES 4000000

typedef struct {
  int fd, busy, head_done, chunked, ok, stream, events;
  long long left;      /* body bytes still to come, content-length framing */
  double due, first;   /* when it should have been sent; first body byte */
  char tail[8192];
  size_t used, to_send;
} conn;

static char *request;
static size_t request_len;
static conn *conns;
static int epfd, n_conns, port;
static double *first_us, *total_us;
static long done, errors, events_total;
static int idle_fds[65536], n_idle;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static int dial(conn *c) {
  int one = 1;
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port),
                           .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (connect(c->fd, (struct sockaddr *)&at, sizeof at)) { perror("connect"); return -1; }
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(epfd, EPOLL_CTL_ADD, c->fd, &e);
  c->busy = 0;
  return 0;
}

static void fire(conn *c, double due) {
  c->busy = 1;
  c->head_done = c->chunked = c->ok = c->stream = c->events = 0;
  c->used = 0;
  c->left = -1;
  c->first = 0;
  c->due = due;
  size_t sent = 0;
  while (sent < request_len) {
    ssize_t n = send(c->fd, request + sent, request_len - sent, MSG_NOSIGNAL);
    if (n <= 0) return;
    sent += n;
  }
}

static void finish(conn *c, int good) {
  double t = now();
  c->busy = 0;
  if (!good) { errors++; return; }
  if (done < MAX_SAMPLES) {
    first_us[done] = (c->first - c->due) * 1e6;
    total_us[done] = (t - c->due) * 1e6;
  }
  done++;
  events_total += c->events;
}

static int count(const char *data, size_t len, const char *what, size_t n) {
  int found = 0;
  const char *at = data, *end = data + len;
  while ((at = memmem(at, end - at, what, n))) { found++; at += n; }
  return found;
}

/* Keeps the last bytes, for the end mark of a chunked body may be split. */
static int receive(conn *c) {
  char data[65536];
  ssize_t n = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
  if (n < 0 && errno == EAGAIN) return 0;
  if (n <= 0) return -1;
  char *body = data;
  size_t len = n;
  if (!c->head_done) {
    /* A head is small and nearly always whole in the first piece. */
    if (c->used) {
      if (c->used + n >= sizeof data || c->used + n >= sizeof c->tail) return -1;
      memmove(data + c->used, data, n);
      memcpy(data, c->tail, c->used);
      n += c->used;
    }
    char *end = memmem(data, n, "\r\n\r\n", 4);
    if (!end) {
      if ((size_t)n >= sizeof c->tail) return -1;
      memcpy(c->tail, data, c->used = n);
      return 0;
    }
    *end = 0;
    c->head_done = 1;
    c->ok = !strncmp(data, "HTTP/1.1 200", 12);
    char *field = strcasestr(data, "content-length:");
    if (field) c->left = strtoll(field + 15, NULL, 10);
    else c->chunked = 1;
    c->stream = strcasestr(data, "text/event-stream") != NULL;
    body = end + 4;
    len = data + n - body;
    c->used = 0;
  }
  if (!len) { if (c->left == 0) finish(c, c->ok); return 0; }
  if (!c->first) c->first = now();
  if (!c->chunked) {
    c->left -= len;
    if (c->left <= 0) finish(c, c->ok);
    return 0;
  }
  c->events += count(body, len, "data: ", 6);
  size_t keep = len < 64 ? len : 64;
  if (c->used + keep > 128) { memmove(c->tail, c->tail + c->used + keep - 128, 128 - keep); c->used = 128 - keep; }
  memcpy(c->tail + c->used, body + len - keep, keep);
  c->used += keep;
  if (c->used >= 5 && !memcmp(c->tail + c->used - 5, "0\r\n\r\n", 5)) {
    int marked = !c->stream || memmem(c->tail, c->used, "[DONE]", 6) != NULL;
    finish(c, c->ok && marked);
  }
  return 0;
}

static int ascending(const void *a, const void *b) {
  double x = *(double *)a, y = *(double *)b;
  return (x > y) - (x < y);
}

static double at(double *sorted, long n, double q) { return n ? sorted[(long)(q * (n - 1))] : 0; }

int main(int argc, char **argv) {
  if (argc < 6) {
    fprintf(stderr, "usage: load PORT CONNECTIONS SECONDS RATE BODY_FILE [HEADER...]\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  port = atoi(argv[1]);
  n_conns = atoi(argv[2]);
  double seconds = atof(argv[3]), rate = atof(argv[4]);
  FILE *file = fopen(argv[5], "rb");
  if (!file) { perror(argv[5]); return 2; }
  static char body[4 << 20];
  size_t len = fread(body, 1, sizeof body, file);
  request = malloc(len + 16384);
  request_len = sprintf(request, "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n"
                        "content-type: application/json\r\ncontent-length: %zu\r\n", port, len);
  for (int i = 6; i < argc; i++) request_len += sprintf(request + request_len, "%s\r\n", argv[i]);
  request_len += sprintf(request + request_len, "\r\n");
  memcpy(request + request_len, body, len);
  request_len += len;
  first_us = malloc(sizeof(double) * MAX_SAMPLES);
  total_us = malloc(sizeof(double) * MAX_SAMPLES);
  conns = calloc(n_conns, sizeof(conn));
  epfd = epoll_create1(0);
  for (int i = 0; i < n_conns; i++) if (dial(&conns[i])) return 1;
  double begin = now(), next = begin;
  if (rate == 0) for (int i = 0; i < n_conns; i++) fire(&conns[i], now());
  else for (int i = n_conns - 1; i >= 0; i--) idle_fds[n_idle++] = i;
  struct epoll_event events[512];
  int running = 1;
  while (running) {
    double t = now();
    int open = t - begin < seconds;
    if (rate > 0 && open)
      while (next <= t && n_idle) { fire(&conns[idle_fds[--n_idle]], next); next += 1 / rate; }
    int wait_ms = 50;
    if (rate > 0 && open && n_idle) { double ms = (next - now()) * 1000; wait_ms = ms < 0 ? 0 : (int)ms; }
    int n = epoll_wait(epfd, events, 512, wait_ms);
    for (int i = 0; i < n; i++) {
      conn *c = events[i].data.ptr;
      if (receive(c) < 0) {
        close(c->fd);
        if (c->busy) errors++;
        if (dial(c)) return 1;
        c->busy = 0;
      }
      if (!c->busy) {
        if (rate > 0) idle_fds[n_idle++] = c - conns;
        else if (now() - begin < seconds) fire(c, now());
      }
    }
    if (!open) {
      int busy = 0;
      for (int i = 0; i < n_conns; i++) busy += conns[i].busy;
      if (!busy || now() - begin > seconds + 20) running = 0;
    }
  }
  double took = now() - begin;
  long n = done < MAX_SAMPLES ? done : MAX_SAMPLES;
  qsort(first_us, n, sizeof(double), ascending);
  qsort(total_us, n, sizeof(double), ascending);
  printf("{\"requests\": %ld, \"errors\": %ld, \"events\": %ld, \"seconds\": %.4f, \"rps\": %.1f, "
         "\"first_p50_us\": %.1f, \"first_p99_us\": %.1f, \"total_p50_us\": %.1f, \"total_p99_us\": %.1f}\n",
         done, errors, events_total, took, done / took, at(first_us, n, .5), at(first_us, n, .99),
         at(total_us, n, .5), at(total_us, n, .99));
  return 0;
}
